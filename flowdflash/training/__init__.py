"""What drafter and evaluator are made of: the window's sums, a draft for a given target, acceptance on prompts."""
