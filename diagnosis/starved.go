package diagnosis

// reasonCPU is a rank that is short of CPU, by the word of its node's agent.
const reasonCPU = "cpu_starved"
