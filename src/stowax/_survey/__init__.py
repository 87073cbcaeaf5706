"""What the planner is asked: candidates, their bytes and seconds, the user's wishes."""
