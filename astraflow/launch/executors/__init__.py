"""Where the processes of a run are started: this machine, or one of several kinds of clusters."""
