"""Starting all roles of a recipe on one machine, and telling what came of it."""
