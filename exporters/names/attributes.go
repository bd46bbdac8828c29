package names

// Attribute documents one span attribute.
type Attribute struct {
	Key  string
	Type string // string, int, double or bool
	On   string // where it appears: resource, collective, window
	Help string
}

// Attributes returns every attribute that Lockstep's spans carry beyond
// OpenTelemetry's own (service.*, host.*), in reading order.
func Attributes() []Attribute { return attributes }

var attributes = []Attribute{
	{AttrJob, "string", "resource", "Training job."},
	{AttrCollective, "string", "collective", "Kind: AllReduce, AllGather, Send."},
	{AttrCommunicator, "string", "collective", "Name of the communicator."},
	{AttrCommID, "string", "collective", "Id of the communicator, 16 hexadecimal digits."},
	{AttrCommSize, "int", "collective", "Ranks in the communicator."},
	{AttrRank, "int", "collective", "Rank in the communicator."},
	{AttrWorldRank, "int", "collective", "Rank in the job."},
	{AttrAttempt, "int", "collective", "Restart count of the job, from 0."},
	{AttrSequence, "int", "collective", "Sequence number in the communicator, from 1."},
	{AttrBytes, "int", "collective, window", "Payload bytes by NCCL's convention; of a window, the bytes that it moved."},
	{AttrDType, "string", "collective", "Element type."},
	{AttrOp, "string", "collective", "Reduction operator, on collectives that reduce."},
	{AttrAlgo, "string", "collective", "Algorithm: ring, doubling, direct."},
	{AttrProto, "string", "collective", "Protocol of the data path: ll, simple."},
	{AttrRoot, "int", "collective", "Root, on collectives that have one."},
	{AttrPeer, "int", "collective, window", "The other end: of Send and Recv, and of a window's connection."},
	{AttrChannels, "int", "collective", "Channels used."},
	{AttrResult, "string", "collective", "How it ended; anything but ok also sets the span's status to error."},
	{AttrOpen, "bool", "collective", "True on the snapshot of a collective that had not ended when it was exported."},
	{AttrQueueTime, "double", "collective", "Seconds from the call to the start: time spent behind earlier work of its stream."},
	{AttrCause, "string", "window", "Why the window was slow: network, sender_starved, receiver_not_ready, cpu_starved."},
	{AttrBandwidth, "double", "window", "Bytes per second between the first post and the last completion."},
	{AttrBacklog, "int", "window", "Largest number of work requests waiting."},
	{AttrWRs, "int", "window", "Work requests in the window."},
}

// Attributes of collective spans beyond those in names.go.
const (
	AttrOpen      = "ccl.open"
	AttrQueueTime = "ccl.queue_time"
)
