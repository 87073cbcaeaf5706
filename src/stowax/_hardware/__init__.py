"""What the chips can do: figures with their sources, quoted, assumed or measured."""
