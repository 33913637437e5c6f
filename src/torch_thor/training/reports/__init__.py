"""Tables and pictures at the end of a run, and the report of the split dimension."""
