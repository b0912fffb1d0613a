"""What a program asks for that no kernel has computed, in the order in which it is answered.

`known_values`: numbers that follow from known ones. `real_reads`: what a real run of the same forward has read.
`checks`: a condition that only raises is passed. `bounded_shapes`: a shape that depends on data, at its largest.
`made_up`: the rest of a program's numbers, each noted. `values` asks them in turn. `stop_rule` is what a generation is
told where it asks whether its sequences have ended.
"""
