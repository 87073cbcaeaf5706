"""What feeds a loop: batches placed ahead of use, and no implicit transfers."""
