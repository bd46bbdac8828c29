package main

// variable is one name in the environment.
type variable struct {
	name, value, of, meaning string
}

// variables are all that the program and its packages read, by who is to set them.
var variables = []struct {
	title string
	vars  []variable
}{
	{"Who a rank is: set by a launcher", []variable{
		{"LOCKSTEP_RANK", "number", "ccl", "The rank, from 0. Else torchrun's `RANK`, or what srun, mpirun or Kubernetes say."},
		{"LOCKSTEP_WORLD_SIZE", "number", "ccl", "How many ranks there are. Else `WORLD_SIZE`, or what the launcher says."},
		{"LOCKSTEP_LOCAL_RANK", "number", "ccl", "The rank's number on its node. Else `LOCAL_RANK`, or what the launcher says."},
		{"LOCKSTEP_RESTART_COUNT", "number, 0", "ccl", "The attempt. Else `TORCHELASTIC_RESTART_COUNT`."},
		{"LOCKSTEP_JOB", "name, job", "ccl, master", "The job, as records, metrics and traces name it."},
		{"LOCKSTEP_NODE", "name, the host's", "ccl, agent", "The logical node: ranks of one name share memory, others connect."},
		{"LOCKSTEP_SLOT", "number", "", "Set for ranks by `lockstep run`: the place on the node, which a spare takes over. Where each slot has a GPU of its own, `CUDA_VISIBLE_DEVICES` moves with it."},
		{"LOCKSTEP_COMM_ID", "id", "ccl", "Where the world's rank 0 listens, and a token. Else it follows from torchrun's `MASTER_ADDR` and `MASTER_PORT`."},
		{"LOCKSTEP_COMM_PORT", "port", "ccl", "Where rank 0 listens when the id follows from `MASTER_PORT` and the port above that is taken."},
		{"LOCKSTEP_SECRET_FILE", "file", "ccl", "At least 16 bytes that all ranks share, by which they prove to each other that they belong together. Ranks of one host need none."},
		{"LOCKSTEP_FENCE_TOKEN", "token", "ccl, fence", "The attempt's: ranks of another one do not meet these, and their checkpoints are refused (docs/design/fencing.md). `lockstep run` makes one for each attempt."},
		{"LOCKSTEP_FENCE", "stop; nothing is stopped", "agent", "Read in a rank's environment: the node's agent may stop what is left of an attempt that is over."},
		{"LOCKSTEP_FENCE_LEASE", "duration", "agent", "Likewise: how long ranks may run on though the agent does not hear the job's master, 5s to 24h; without it for ever. Needs `LOCKSTEP_FENCE=stop`."},
		{"LOCKSTEP_FENCE_GRACE", "duration, 3s", "agent", "Likewise: the time between SIGTERM and SIGKILL, at most 1m."},
	}},
	{"How ranks compute and connect", []variable{
		{"LOCKSTEP_DEVICE", "cpu, cuda:N or cuda; cpu", "ccl", "The rank's GPU; `cuda` is the one of the local rank's number."},
		{"LOCKSTEP_ALGO", "direct, ring, doubling, tree, hierarchical", "ccl", "Forces an algorithm where a collective has it. For comparing."},
		{"LOCKSTEP_PROTO", "ll, simple", "ccl", "Forces a protocol. For comparing."},
		{"LOCKSTEP_GPU_ALGO", "ring, ce, ll, ll2, ll12, sym, bulk, pushbulk, chain", "ccl", "Forces an algorithm on GPUs where a collective has it; the same on all ranks. For comparing."},
		{"LOCKSTEP_GPU_TABLE", "file", "ccl", "Another table of algorithms for GPUs, as bench/cmd/gputune writes it; the same on all ranks."},
		{"LOCKSTEP_GPU_PACE", "GB/s", "ccl", "How much each GPU sends to its peers by bulk copies, and by rings, at most; by default what its links are known to carry."},
		{"LOCKSTEP_GPU_STAGING", "MiB; 128", "ccl", "How much memory of each GPU is for operations on buffers in no window; the same on all ranks."},
		{"LOCKSTEP_GPU_PEERS", "off, slow, on; slow on GPUs of compute capability 9.0 with a driver of CUDA 12.4 or newer, else off", "ccl", "Of which recorded operations on GPUs kernels stamp each peer's part: none, those of 16 MiB and more, all."},
		{"LOCKSTEP_GPUDIRECT", "auto, off, require; off", "ccl", "Whether NICs read the GPUs' memory between nodes."},
		{"LOCKSTEP_NET", "auto, rdma, tcp; auto", "ccl", "What carries bytes between nodes."},
		{"LOCKSTEP_IFNAME", "interface", "ccl", "Where a rank listens for other nodes; by default the interface that leads to rank 0."},
		{"LOCKSTEP_SOCKETS", "number, 2 (8 with a planner)", "ccl", "Sockets of a TCP connection between nodes; with a planner, of each end, 8 at most."},
		{"LOCKSTEP_OUTAGE_TIMEOUT", "duration, 30s", "ccl", "How long another rank's host may be silent, 1s to 1h."},
		{"LOCKSTEP_PLANNER", "HOST:PORT", "lockstep perf, train, planner probe", "The fabric's planner, which gives connections their paths, over TCP and RoCE v2."},
		{"LOCKSTEP_PLANNER_CERT", "file", "lockstep perf, train", "The job's certificate on this node, for the planner."},
		{"LOCKSTEP_PLANNER_KEY", "file", "lockstep perf, train", "Its key."},
		{"LOCKSTEP_PLANNER_CA", "file", "lockstep perf, train", "The authority of both ends."},
		{"LOCKSTEP_PLANNER_INSECURE", "1", "lockstep perf, train", "Believe whoever answers as the planner, without TLS."},
		{"LOCKSTEP_RDMA_HCA", "list", "ccl, lockstep nics", "Which ports may be used, in the syntax of NCCL_IB_HCA."},
		{"LOCKSTEP_RDMA_GID", "address or prefix", "ccl, lockstep nics", "Which GID of a port is used."},
		{"LOCKSTEP_RDMA_QPS", "number, 1", "ccl", "Queue pairs that a connection sends over at once, 1 to 16."},
		{"LOCKSTEP_RDMA_TIMEOUT", "number, 14", "ccl", "How long a NIC waits for an acknowledgement: 4.096 µs × 2^n."},
		{"LOCKSTEP_RDMA_RETRIES", "number, 6", "ccl", "How often a NIC sends again, 1 to 6."},
		{"LOCKSTEP_RDMA_TRAFFIC_CLASS", "number, 0", "ccl", "Traffic class of queue pairs."},
		{"LOCKSTEP_RDMA_SERVICE_LEVEL", "number, 0", "ccl", "Service level of queue pairs."},
	}},
	{"What is recorded, and where", []variable{
		{"LOCKSTEP_RUNTIME_DIR", "directory, /dev/shm/lockstep-UID", "record", "Flight recorders, shared memory between ranks, sockets. On a disk GPUs cannot write to the recorder, and the host brings their stamps there."},
		{"LOCKSTEP_ATTACH_WAIT", "duration, 5s", "lockstep attach", "For how long the command waits at most for an agent and a master that attach starts: on a machine that is busy, more."},
		{"LOCKSTEP_ATTACH_LINGER", "duration, 5s", "lockstep attach", "How long the agent and the master that attach has started outlive the last attached process."},
		{"LOCKSTEP_ATTACH_AGENT", "auto, never; auto", "lockstep attach", "Whether attach starts an agent and a master where there are none."},
		{"LOCKSTEP_NCCL_PLUGIN", "file", "lockstep attach", "NCCL's profiler plugin, when it is not beside the program."},
		{"LOCKSTEP_PKI", "directory", "lockstep attach", "Certificates that `lockstep pki` has made, for jobs of several nodes."},
		{"LOCKSTEP_RECORDER", "on, off; on", "ccl", "Whether a rank has a flight recorder."},
		{"LOCKSTEP_LOG_LEVEL", "debug, info, warn, error; info", "commands", "What components log."},
		{"LOCKSTEP_MASTER", "address", "agent, remediator", "Where masters listen."},
	}},
	{"Libraries and tools, tests and demos", []variable{
		{"LOCKSTEP_CUDA_LIBRARY", "file, libcuda.so.1", "ccl/internal/cuda", "The CUDA driver's library, beside which NVML is then looked for; tests put a model of both there."},
		{"LOCKSTEP_LIBIBVERBS", "file, libibverbs.so.1", "ccl/internal/verbs", "The verbs library; tests put a model of it there."},
		{"LOCKSTEP_FAKE_CUDA", "options", "ccl/internal/cuda/cudatest", "What the model of the CUDA driver has."},
		{"LOCKSTEP_FAULT_DIR", "directory", "demo", "Where ranks of `lockstep train` listen for faults to inject."},
		{"LOCKSTEP_TEST_STRANGER", "command", "internal/stranger", "What a test's other user does."},
		{"LOCKSTEP_TOOLS_DIR", "directory", "deploy/local", "Where the demo finds Prometheus and Alertmanager before PATH."},
	}},
}
