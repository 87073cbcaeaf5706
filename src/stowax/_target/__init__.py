"""The machine that is planned for, there or not, and its compiler."""
