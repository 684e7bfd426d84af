"""The page that a team passes around: one self-contained HTML file about train/rollout mismatch."""
