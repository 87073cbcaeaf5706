"""What travels between the parts, as plain records that know no JAX."""
