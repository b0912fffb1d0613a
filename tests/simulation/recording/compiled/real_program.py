"""A real compiled program on the CPU, as `fxmem.validation.measure_program` measures it, in a process of its own."""

from tests.simulation.recording.compiled.real import believe_the_cpu, without_kernels

if __name__ == "__main__":
    from fxmem.validation.measure_program import main

    with believe_the_cpu(), without_kernels():
        main()
