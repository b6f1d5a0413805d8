"""One definition of each measure, for the live system and the simulator."""
