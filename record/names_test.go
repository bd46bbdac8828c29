package record

import "testing"

// TestNames: every value has a name, and no two have the same: a name that is missing
// would be an empty label.
func TestNames(t *testing.T) {
	transportNames := make([]string, numTransports)
	for i := range transports {
		transportNames[i] = transports[i].name
	}
	for what, names := range map[string][]string{
		"CollKind": collNames[:], "DType": dtypeNames[:], "RedOp": opNames[:], "Kind": kindNames[:], "Algo": algoNames[:], "Proto": protoNames[:],
		"Transport": transportNames, "Cause": causeNames[:], "Result": resultNames[:], "Source": sourceNames[:], "EventSet": eventSetNames[:], "MarkCode": markNames[:],
	} {
		values := map[string]int{}
		for i, name := range names {
			if name == "" {
				t.Errorf("%s %d has no name in package record", what, i)
			} else if other, ok := values[name]; ok {
				t.Errorf("%s %d is named %q in package record, as %d is", what, i, name, other)
			}
			values[name] = i
		}
	}
	for d, size := range dtypeSizes {
		if size == 0 {
			t.Errorf("%v has no size in layout.go", DType(d))
		}
	}
	for v := Transport(0); v < 255; v++ { // records of a newer version have transports that this one has not
		if v.Known() && v.String() == "" || !v.Known() && (v.InMemory() || v.QueuePair() || v.Stamped() || v.Seeks() != 0) {
			t.Errorf("transport %d: %v, known %v", v, v, v.Known())
		}
	}
}
