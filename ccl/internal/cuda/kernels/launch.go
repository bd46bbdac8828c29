package kernels

// How bulk kernels are launched: the threads they are written for, and dynamic
// shared memory for as many stages as one SM has room for.
const (
	BulkThreads     = 320 // LS_BULK_THREADS
	BulkShared      = 216 << 10
	BulkPushThreads = 256 // LS_BULK_PUSH_THREADS
	BulkPushShared  = 8*16<<10 + 256

	PushReduceThreads = 320      // LS_PUSHREDUCE_THREADS
	RingThreads       = 544      // LS_RING_THREADS where bytes are moved
	RingReduceThreads = 512      // LS_RING_THREADS where elements are combined
	RingShared        = 96 << 10 // LS_RING_SHARED, the larger
)
