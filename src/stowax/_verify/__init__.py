"""`verify`, the gate before a long run: the planned step beside the plain one."""
