"""Reading and running jaxprs: what repeats in them, and what depends on what."""
