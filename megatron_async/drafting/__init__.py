"""Where drafts come from: multi-token prediction, prompt look-up, a model of their own."""
