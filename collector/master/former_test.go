package master

import (
	"encoding/binary"
	"os"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/lockstep-ccl/lockstep/collector/wire"
	"github.com/lockstep-ccl/lockstep/diagnosis"
)

// What an agent of the first build with this protocol has said is understood: fields were
// only added since. The file holds messages, each after its length.
func TestFormerMessages(t *testing.T) {
	said, err := os.ReadFile("testdata/progress-1.bin")
	if err != nil {
		t.Fatal(err)
	}
	m := start(t, Options{})
	s := dial(t, m)
	messages := 0
	for len(said) > 0 {
		n, k := binary.Uvarint(said)
		if k <= 0 || n > uint64(len(said)-k) {
			t.Fatal("the file is damaged")
		}
		var msg wire.AgentMessage
		if err := proto.Unmarshal(said[k:k+int(n)], &msg); err != nil {
			t.Fatal(err)
		}
		if len(msg.ProtoReflect().GetUnknown()) > 0 {
			t.Errorf("message %d has fields that are gone", messages)
		}
		if err := s.Send(&msg); err != nil {
			t.Fatal(err)
		}
		said, messages = said[k+int(n):], messages+1
	}
	if messages != 2 {
		t.Fatalf("%d messages", messages)
	}
	for {
		in, err := s.Recv()
		if err != nil {
			t.Fatal(err)
		}
		if in.GetAck().GetSequence() == 1 {
			break
		}
	}
	for deadline := time.Now().Add(30 * time.Second); time.Now().Before(deadline); time.Sleep(5 * time.Millisecond) {
		if s := m.Snapshot(); s.WorldSize == 2 && s.Ranks[diagnosis.ProcRunning] == 2 && s.Refused == 0 {
			return
		}
	}
	t.Errorf("the ranks are not known: %+v", m.Snapshot())
}
