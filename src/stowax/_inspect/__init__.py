"""What a compiled program really does, beside what its step asked for."""
