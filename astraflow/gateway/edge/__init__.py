"""The HTTP edge: what a request may cost, how its body is read, how an answer is written."""
