"""A page that shows runs: what it reads of them, how it is served, how one is exported."""
