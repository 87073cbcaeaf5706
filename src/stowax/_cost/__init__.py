"""What operations take on a chip, from their jaxprs: operations, bytes, seconds."""
