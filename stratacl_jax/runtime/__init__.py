"""What runs below the operators: settings, processors, errors, the world."""
