"""The commands of the command line, one per module. Each imports what it needs when it runs, so that --help is fast."""
