"""What tests of paceline, and of code that builds on it, need: tiny models and a stand-in for the Hub."""
