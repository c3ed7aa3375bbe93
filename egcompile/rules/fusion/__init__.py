"""Which work one kernel can do: each rule offers a named fused op for what stands apart in the graph.

Only contractions with their epilogues and sibling outputs are named here, and norms with the sums beside
them. That pointwise work goes into its readers is not a rule: extraction decides it for each edge.
"""
