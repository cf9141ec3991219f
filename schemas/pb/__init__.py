"""Generated from proto/ by scripts/proto: committed, never edited, compared by a test."""
