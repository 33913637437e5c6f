"""Tables and pictures at the end of a run, and the report of the choice of a split dimension."""
