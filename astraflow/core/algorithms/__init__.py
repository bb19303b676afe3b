"""Data algorithms: which prompt is asked next, what is kept of a group, what makes a batch.

`points` has the protocols, `finding` makes an algorithm from its name and options. The built-in
ones lie in `selection`, `filters` and `serving`, one file each.
"""
