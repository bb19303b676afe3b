"""The weight plane: publish versions, serve them, pull them, all of it verified."""
