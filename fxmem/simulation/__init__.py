"""One training step on FakeTensors, written down as a `Profile`."""
