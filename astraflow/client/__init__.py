"""What a member or an operator of a run uses: its session, its streams, its calls."""
