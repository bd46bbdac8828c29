package kernels

import "unsafe"

// Assertion is a constant expression of abi.h and the value it must have.
type Assertion struct {
	Expr  string
	Value uintptr
}

// Layout is what abi.go believes about abi.h.
func Layout() []Assertion {
	var a Args
	var p P2PArgs
	var m P2PMessage
	var l P2PListArgs
	var u P2PQueue
	var i P2PItem
	var j ItemsArgs
	var f FoldArgs
	var c ClockArgs
	var d DelayArgs
	var y StagedMessage
	var z StagedArgs
	var k MarkArgs
	var q PatternArgs
	var s Slot
	var h heap
	return []Assertion{
		{"LS_MAX_RANKS", MaxRanks}, {"LS_MAX_BLOCKS", MaxBlocks}, {"LS_MAX_MESSAGES", MaxMessages},
		{"LS_LL_LINES", llLines}, {"LS_LL12_LINES", ll12Lines}, {"LS_CHAIN_WARPS", chainWarps}, {"LS_CHAIN_BYTES", chainBytes}, {"LS_LANES", MaxLanes}, {"LS_LANE_LINES", laneLines}, {"LS_QUEUES", MaxQueues}, {"LS_ITEMS", Items},
		{"LS_MORE_ITEMS", MoreItems}, {"LS_LOAD_ITEMS", LoadItems}, {"LS_PIECE_UNIT", PieceUnit}, {"LS_PHASES", phases}, {"LS_FIRST", First}, {"LS_LAST", Last}, {"LS_MEET", Meet},

		{"sizeof(Args)", unsafe.Sizeof(a)},
		{"offsetof(Args, heap)", unsafe.Offsetof(a.Heap)}, {"offsetof(Args, send)", unsafe.Offsetof(a.Send)},
		{"offsetof(Args, recv)", unsafe.Offsetof(a.Recv)}, {"offsetof(Args, count)", unsafe.Offsetof(a.Count)},
		{"offsetof(Args, slots)", unsafe.Offsetof(a.Slots)}, {"offsetof(Args, abort)", unsafe.Offsetof(a.Abort)},
		{"offsetof(Args, slotMask)", unsafe.Offsetof(a.SlotMask)}, {"offsetof(Args, desc)", unsafe.Offsetof(a.Desc)},
		{"offsetof(Args, rank)", unsafe.Offsetof(a.Rank)}, {"offsetof(Args, ranks)", unsafe.Offsetof(a.Ranks)},
		{"offsetof(Args, root)", unsafe.Offsetof(a.Root)}, {"offsetof(Args, op)", unsafe.Offsetof(a.Op)},
		{"offsetof(Args, flags)", unsafe.Offsetof(a.Flags)}, {"offsetof(Args, room)", unsafe.Offsetof(a.Room)}, {"offsetof(Args, ring)", unsafe.Offsetof(a.Ring)},
		{"offsetof(Args, pace)", unsafe.Offsetof(a.Pace)}, {"offsetof(Args, peers)", unsafe.Offsetof(a.Peers)},
		{"sizeof(PeerRow)", MaxRanks * unsafe.Sizeof(PeerStamp{})}, {"offsetof(PeerRow, peer[0].trip)", unsafe.Offsetof(PeerStamp{}.Trip)}, {"offsetof(PeerRow, peer[0].seq)", unsafe.Offsetof(PeerStamp{}.Seq)},
		{"offsetof(Args, stride)", unsafe.Offsetof(a.Stride)}, {"LS_RING_BYTES", RingBytes},

		{"sizeof(Message)", unsafe.Sizeof(m)},
		{"offsetof(Message, bytes)", unsafe.Offsetof(m.Bytes)},
		{"offsetof(Message, piece)", unsafe.Offsetof(m.Piece)},
		{"offsetof(Message, target)", unsafe.Offsetof(m.Target)},
		{"offsetof(Message, stage)", unsafe.Offsetof(m.Stage)},
		{"offsetof(Message, room)", unsafe.Offsetof(m.Room)},
		{"offsetof(Message, peer)", unsafe.Offsetof(m.Peer)},
		{"offsetof(Message, lanes)", unsafe.Offsetof(m.Lanes)},
		{"offsetof(Message, direct)", unsafe.Offsetof(m.Direct)},
		{"offsetof(Message, first)", unsafe.Offsetof(m.First)},
		{"offsetof(Message, blocks)", unsafe.Offsetof(m.Blocks)},

		{"sizeof(P2PArgs)", unsafe.Sizeof(p)},
		{"offsetof(P2PArgs, stride)", unsafe.Offsetof(p.Stride)},
		{"offsetof(P2PArgs, slots)", unsafe.Offsetof(p.Slots)},
		{"offsetof(P2PArgs, abort)", unsafe.Offsetof(p.Abort)},
		{"offsetof(P2PArgs, slotMask)", unsafe.Offsetof(p.SlotMask)},
		{"offsetof(P2PArgs, desc)", unsafe.Offsetof(p.Desc)},
		{"offsetof(P2PArgs, rank)", unsafe.Offsetof(p.Rank)},
		{"offsetof(P2PArgs, ranks)", unsafe.Offsetof(p.Ranks)},
		{"offsetof(P2PArgs, flags)", unsafe.Offsetof(p.Flags)},
		{"offsetof(P2PArgs, pace)", unsafe.Offsetof(p.Pace)},
		{"offsetof(P2PArgs, send)", unsafe.Offsetof(p.Send)},
		{"offsetof(P2PArgs, receive)", unsafe.Offsetof(p.Recv)},

		{"sizeof(Item)", unsafe.Sizeof(i)},
		{"offsetof(Item, bytes)", unsafe.Offsetof(i.Bytes)}, {"offsetof(Item, target)", unsafe.Offsetof(i.Target)},
		{"offsetof(Item, piece)", unsafe.Offsetof(i.Piece)}, {"offsetof(Item, lanes)", unsafe.Offsetof(i.Lanes)},

		{"sizeof(Queue)", unsafe.Sizeof(u)},
		{"offsetof(Queue, begin)", unsafe.Offsetof(u.Begin)}, {"offsetof(Queue, count)", unsafe.Offsetof(u.Count)},
		{"offsetof(Queue, first)", unsafe.Offsetof(u.First)}, {"offsetof(Queue, blocks)", unsafe.Offsetof(u.Blocks)},
		{"offsetof(Queue, peer)", unsafe.Offsetof(u.Peer)}, {"offsetof(Queue, send)", unsafe.Offsetof(u.Send)},
		{"offsetof(Queue, direct)", unsafe.Offsetof(u.Direct)},

		{"sizeof(P2PListArgs)", unsafe.Sizeof(l)},
		{"offsetof(P2PListArgs, stride)", unsafe.Offsetof(l.Stride)}, {"offsetof(P2PListArgs, slots)", unsafe.Offsetof(l.Slots)},
		{"offsetof(P2PListArgs, abort)", unsafe.Offsetof(l.Abort)}, {"offsetof(P2PListArgs, slotMask)", unsafe.Offsetof(l.SlotMask)},
		{"offsetof(P2PListArgs, desc)", unsafe.Offsetof(l.Desc)}, {"offsetof(P2PListArgs, rank)", unsafe.Offsetof(l.Rank)},
		{"offsetof(P2PListArgs, ranks)", unsafe.Offsetof(l.Ranks)}, {"offsetof(P2PListArgs, flags)", unsafe.Offsetof(l.Flags)},
		{"offsetof(P2PListArgs, pace)", unsafe.Offsetof(l.Pace)}, {"offsetof(P2PListArgs, room)", unsafe.Offsetof(l.Room)}, {"offsetof(P2PListArgs, stage)", unsafe.Offsetof(l.Stage)},
		{"offsetof(P2PListArgs, items)", unsafe.Offsetof(l.Items)}, {"offsetof(P2PListArgs, queue)", unsafe.Offsetof(l.Queue)},
		{"offsetof(P2PListArgs, item)", unsafe.Offsetof(l.Item)},

		{"sizeof(ItemsArgs)", unsafe.Sizeof(j)}, {"offsetof(ItemsArgs, count)", unsafe.Offsetof(j.Count)},
		{"offsetof(ItemsArgs, item)", unsafe.Offsetof(j.Item)},

		{"sizeof(FoldArgs)", unsafe.Sizeof(f)},
		{"offsetof(FoldArgs, slots)", unsafe.Offsetof(f.Slots)}, {"offsetof(FoldArgs, abort)", unsafe.Offsetof(f.Abort)},
		{"offsetof(FoldArgs, slotMask)", unsafe.Offsetof(f.SlotMask)}, {"offsetof(FoldArgs, desc)", unsafe.Offsetof(f.Desc)},
		{"offsetof(FoldArgs, rank)", unsafe.Offsetof(f.Rank)}, {"offsetof(FoldArgs, ranks)", unsafe.Offsetof(f.Ranks)},
		{"offsetof(FoldArgs, flags)", unsafe.Offsetof(f.Flags)}, {"offsetof(FoldArgs, op)", unsafe.Offsetof(f.Op)},
		{"offsetof(FoldArgs, src)", unsafe.Offsetof(f.Src)}, {"offsetof(FoldArgs, dst)", unsafe.Offsetof(f.Dst)},
		{"offsetof(FoldArgs, count)", unsafe.Offsetof(f.Count)}, {"offsetof(FoldArgs, k)", unsafe.Offsetof(f.K)},

		{"sizeof(ClockArgs)", unsafe.Sizeof(c)},
		{"offsetof(ClockArgs, word)", unsafe.Offsetof(c.Word)}, {"offsetof(ClockArgs, slot)", unsafe.Offsetof(c.Slot)},
		{"offsetof(ClockArgs, abort)", unsafe.Offsetof(c.Abort)}, {"offsetof(ClockArgs, first)", unsafe.Offsetof(c.First)},
		{"offsetof(ClockArgs, rounds)", unsafe.Offsetof(c.Rounds)}, {"offsetof(ClockArgs, turns)", unsafe.Offsetof(c.Turns)},

		{"LS_STAGED_PAD", StagedPad}, {"sizeof(StagedMessage)", unsafe.Sizeof(y)},
		{"offsetof(StagedMessage, bytes)", unsafe.Offsetof(y.Bytes)}, {"offsetof(StagedMessage, slot)", unsafe.Offsetof(y.Slot)},
		{"offsetof(StagedMessage, mine)", unsafe.Offsetof(y.Mine)}, {"offsetof(StagedMessage, theirs)", unsafe.Offsetof(y.Theirs)},
		{"offsetof(StagedMessage, after)", unsafe.Offsetof(y.After)}, {"offsetof(StagedMessage, half)", unsafe.Offsetof(y.Half)},
		{"offsetof(StagedMessage, first)", unsafe.Offsetof(y.First)}, {"offsetof(StagedMessage, afterFirst)", unsafe.Offsetof(y.AfterFirst)},
		{"offsetof(StagedMessage, send)", unsafe.Offsetof(y.Send)},
		{"sizeof(StagedArgs)", unsafe.Sizeof(z)}, {"offsetof(StagedArgs, list)", unsafe.Offsetof(z.List)},
		{"offsetof(StagedArgs, count)", unsafe.Offsetof(z.Count)},

		{"sizeof(MarkArgs)", unsafe.Sizeof(k)}, {"offsetof(MarkArgs, slot)", unsafe.Offsetof(k.Slot)},
		{"offsetof(MarkArgs, id)", unsafe.Offsetof(k.ID)}, {"offsetof(MarkArgs, word)", unsafe.Offsetof(k.Word)},
		{"offsetof(MarkArgs, count)", unsafe.Offsetof(k.Count)}, {"offsetof(MarkArgs, flags)", unsafe.Offsetof(k.Flags)},

		{"sizeof(DelayArgs)", unsafe.Sizeof(d)}, {"offsetof(DelayArgs, abort)", unsafe.Offsetof(d.Abort)},
		{"sizeof(PatternArgs)", unsafe.Sizeof(q)}, {"offsetof(PatternArgs, bytes)", unsafe.Offsetof(q.Bytes)},
		{"offsetof(PatternArgs, seed)", unsafe.Offsetof(q.Seed)}, {"offsetof(PatternArgs, wrong)", unsafe.Offsetof(q.Wrong)},

		{"sizeof(Slot)", unsafe.Sizeof(s)}, {"offsetof(Slot, start)", unsafe.Offsetof(s.Start)},
		{"offsetof(Slot, arrived)", unsafe.Offsetof(s.Arrived)}, {"offsetof(Slot, end)", unsafe.Offsetof(s.End)},

		{"sizeof(Line)", unsafe.Sizeof(line{})}, {"sizeof(BlockState)", unsafe.Sizeof(blockState{})},
		{"sizeof(Heap)", unsafe.Sizeof(h)}, {"offsetof(Heap, op)", HeapSeq}, {"offsetof(Heap, op.arrived)", unsafe.Offsetof(h.op) + unsafe.Offsetof(h.op.arrived)},
		{"offsetof(Heap, flag)", unsafe.Offsetof(h.flag)},
		{"offsetof(Heap, here)", unsafe.Offsetof(h.here)}, {"offsetof(Heap, lane)", unsafe.Offsetof(h.lane)},
		{"offsetof(Heap, credit)", unsafe.Offsetof(h.credit)}, {"offsetof(Heap, arrived)", unsafe.Offsetof(h.arrived)}, {"offsetof(Heap, offer)", unsafe.Offsetof(h.offer)},
		{"offsetof(Heap, copied)", HeapCopied}, {"offsetof(Heap, ready)", HeapReady},
		{"offsetof(Heap, landed)", unsafe.Offsetof(h.landed)}, {"offsetof(Heap, taken)", unsafe.Offsetof(h.taken)},
		{"offsetof(Heap, target)", unsafe.Offsetof(h.target)},
		{"offsetof(Heap, ll)", unsafe.Offsetof(h.ll)}, {"offsetof(Heap, ll2)", unsafe.Offsetof(h.ll2)},
		{"offsetof(Heap, ll12)", unsafe.Offsetof(h.ll12)}, {"offsetof(Heap, read)", unsafe.Offsetof(h.read)}, {"offsetof(Heap, chain)", unsafe.Offsetof(h.chain)},
		{"offsetof(Heap, p2p)", unsafe.Offsetof(h.p2p)}, {"offsetof(Heap, item)", HeapItems},
	}
}
