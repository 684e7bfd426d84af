"""The report's drill-down in a terminal, for a machine that is reached over ssh."""
