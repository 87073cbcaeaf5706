"""What a plan says of itself: decisions and reasons, a proof, what would change it."""
