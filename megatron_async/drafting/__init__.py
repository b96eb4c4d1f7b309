"""Where drafts come from: multi-token prediction, prompt look-up."""
