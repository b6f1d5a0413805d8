"""What the store costs beside what this machine allows, measured in one run."""
