package service

import (
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"

	"github.com/lockstep-ccl/lockstep/collector/wire"
)

// Credentials are those with which to dial a planner: it must be that by its certificate.
// Without files, and unless open, it must be of this user on this host.
func Credentials(t *wire.TLS, open bool) (credentials.TransportCredentials, error) {
	if t == nil && open {
		return insecure.NewCredentials(), nil
	}
	return t.PlannerOf()
}
