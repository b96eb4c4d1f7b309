"""What each path takes and answers."""
