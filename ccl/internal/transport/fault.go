package transport

// Faults, gate: placeholder
type Faults interface{}
type gate struct{}
func (g *gate) send(b []byte) (int, error) { return 0, nil }
func (g *gate) sendLine(b []byte, tag uint32) (bool, error) { return false, nil }
func (g *gate) align() {}
func (g *gate) pump(now int64) int64 { return 0 }
func (m *mesh) newGate(l pipeline, peer int) *gate { return nil }
