"""Golden runs: trainings whose every bit is on record (CONTRIBUTING.md)."""
