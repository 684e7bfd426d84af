"""One module per family of checks. A check takes a dump and adds to the findings; it never stops at the first."""
