package diagnosis_test

import (
	"testing"

	"github.com/lockstep-ccl/lockstep/diagnosis"
	"github.com/lockstep-ccl/lockstep/record"
)

func TestConnString(t *testing.T) {
	for _, c := range []struct {
		conn diagnosis.Conn
		want string
	}{
		{diagnosis.Conn{Transport: record.TransportSHM, Name: "shm 0->1"}, "shm 0->1"},
		{diagnosis.Conn{Transport: record.TransportTCP, Name: "tcp 10.0.0.7:4000->10.0.0.8:5000"}, "tcp 10.0.0.7:4000->10.0.0.8:5000"},
		{diagnosis.Conn{Transport: record.TransportRDMA}, "rdma"},
		{diagnosis.Conn{
			Transport: record.TransportRDMA, Name: "mlx5_0/1->mlx5_2/1", QueuePair: 284, PeerQueuePair: 301, Rail: 1,
			Address: diagnosis.ParseAddress("::ffff:10.0.0.7"),
		}, "rdma mlx5_0/1->mlx5_2/1 qp 284->301 rail 1 gid 10.0.0.7"},
	} {
		if got := c.conn.String(); got != c.want {
			t.Errorf("got %q, want %q", got, c.want)
		}
	}
	c := diagnosis.Conn{Transport: record.TransportRDMA, Name: "mlx5_0/1->mlx5_2/1"}
	if device, port := c.NIC(); device != "mlx5_0" || port != 1 {
		t.Error(device, port)
	}
	for _, name := range []string{"", "mlx5_0/1", "mlx5_0->x", "mlx5_0/x->y", "tcp 1.2.3.4:5->6.7.8.9:1", "/->"} {
		if device, port := record.NICOf(name); device != "" && port < 1 {
			t.Errorf("%q: %q %d", name, device, port)
		}
	}
	for _, a := range []string{"fe80::1", "10.0.0.7", ""} {
		if got := diagnosis.ParseAddress(a).String(); got != a {
			t.Errorf("%q became %q", a, got)
		}
	}
}
