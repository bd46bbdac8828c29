package wire

import (
	"context"
	"crypto/x509"
	"errors"
	"fmt"
	"net/url"
	"regexp"
	"slices"
	"strings"
	"time"

	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/peer"
)

// Role is what a process may do by its certificate.
type Role string

const (
	RoleAgent      Role = "agent"      // reports of one node's ranks
	RoleMaster     Role = "master"     // judges one job
	RoleRemediator Role = "remediator" // asks masters for incidents
	RolePlanner    Role = "planner"    // gives jobs' connections their paths
)

// Identity is who a process is, by its certificate. It stands there as SPIFFE
// IDs, URIs among the subject's alternative names:
//
//	spiffe://DOMAIN/lockstep/agent/NODE          an agent, for every job on its node
//	spiffe://DOMAIN/lockstep/agent/NODE/job/JOB  for this job only; one URI a job
//	spiffe://DOMAIN/lockstep/master/JOB          the master of a job
//	spiffe://DOMAIN/lockstep/remediator          the remediator
//	spiffe://DOMAIN/lockstep/planner             the fabric's planner
//
// A certificate has one role, and one node.
type Identity struct {
	Domain string
	Role   Role
	Node   string   // an agent's
	Jobs   []string // that it speaks for; nil: an agent's every job
}

// ErrIdentity says that a certificate does not allow what its holder attempted.
var ErrIdentity = errors.New("not allowed by its certificate")

var (
	jobName     = regexp.MustCompile(`^[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?$`)
	trustDomain = regexp.MustCompile(`^[a-z0-9._-]{1,255}$`)
	nodeName    = regexp.MustCompile(`^[A-Za-z0-9]([-A-Za-z0-9._]{0,61}[A-Za-z0-9])?$`)
)

// CheckJob returns an error unless name can be a job's: a DNS label (RFC 1123), since
// addresses are made of it.
func CheckJob(name string) error {
	if !jobName.MatchString(name) {
		return fmt.Errorf("job name %.80q: want a DNS label: at most 63 of a-z, 0-9 and -, beginning and ending with a letter or digit", name)
	}
	return nil
}

// CheckNode returns an error unless name can be a node's.
func CheckNode(name string) error {
	if !nodeName.MatchString(name) {
		return fmt.Errorf("node name %.80q: want at most 63 letters, digits, dots, underscores and -, beginning and ending with a letter or digit", name)
	}
	return nil
}

// Check returns an error unless id can stand in a certificate.
func (id Identity) Check() error {
	var errs []error
	if id.Role == RoleAgent {
		errs = append(errs, CheckNode(id.Node))
	}
	for _, job := range id.Jobs {
		errs = append(errs, CheckJob(job))
	}
	if len(id.URIs()) == 0 {
		errs = append(errs, fmt.Errorf("%w: role %q says nothing", ErrIdentity, id.Role))
	}
	return errors.Join(errs...)
}

// URIs returns the names that stand for id in a certificate.
func (id Identity) URIs() []*url.URL {
	uri := func(parts ...string) *url.URL {
		return &url.URL{Scheme: "spiffe", Host: id.Domain, Path: "/lockstep/" + strings.Join(parts, "/")}
	}
	var uris []*url.URL
	switch {
	case id.Role == RoleAgent && id.Jobs == nil:
		uris = append(uris, uri("agent", id.Node))
	case id.Role == RoleAgent:
		for _, job := range id.Jobs {
			uris = append(uris, uri("agent", id.Node, "job", job))
		}
	case id.Role == RoleMaster:
		for _, job := range id.Jobs {
			uris = append(uris, uri("master", job))
		}
	case id.Role == RoleRemediator:
		uris = append(uris, uri("remediator"))
	case id.Role == RolePlanner:
		uris = append(uris, uri("planner"))
	}
	return uris
}

func (id Identity) String() string {
	var s []string
	for _, u := range id.URIs() {
		s = append(s, u.String())
	}
	return strings.Join(s, " ")
}

// IdentityIn reads the identity in a certificate. URIs of others are passed over.
func IdentityIn(cert *x509.Certificate) (Identity, error) {
	var id Identity
	add := func(u *url.URL, role Role, node string, job *string) error {
		switch {
		case id.Role != "" && (id.Role != role || id.Node != node || id.Domain != u.Host):
			return fmt.Errorf("%w: %s beside another identity: a certificate has one", ErrIdentity, u)
		case id.Role != "" && (job == nil || id.Jobs == nil):
			return fmt.Errorf("%w: %s beside another name of the same: all jobs, or each by its own", ErrIdentity, u)
		}
		id.Domain, id.Role, id.Node = u.Host, role, node
		if job != nil {
			id.Jobs = append(id.Jobs, *job)
		}
		return nil
	}
	for _, u := range cert.URIs {
		path, ours := strings.CutPrefix(u.Path, "/lockstep/")
		if u.Scheme != "spiffe" || !ours {
			continue
		}
		if !trustDomain.MatchString(u.Host) || u.String() != "spiffe://"+u.Host+u.Path { // user, port, query, fragment, escapes
			return Identity{}, fmt.Errorf("%w: %q is no SPIFFE ID: want spiffe://DOMAIN/PATH and nothing else", ErrIdentity, u)
		}
		p := strings.Split(path, "/")
		var err error
		switch {
		case len(p) == 2 && p[0] == "agent":
			err = errors.Join(CheckNode(p[1]), add(u, RoleAgent, p[1], nil))
		case len(p) == 4 && p[0] == "agent" && p[2] == "job":
			err = errors.Join(CheckNode(p[1]), CheckJob(p[3]), add(u, RoleAgent, p[1], &p[3]))
		case len(p) == 2 && p[0] == "master":
			err = errors.Join(CheckJob(p[1]), add(u, RoleMaster, "", &p[1]))
		case len(p) == 1 && p[0] == "remediator":
			err = add(u, RoleRemediator, "", nil)
		case len(p) == 1 && p[0] == "planner":
			err = add(u, RolePlanner, "", nil)
		default:
			err = fmt.Errorf("%w: %s means nothing to this version", ErrIdentity, u)
		}
		if err != nil {
			return Identity{}, err
		}
	}
	if id.Role == "" {
		return Identity{}, fmt.Errorf("%w: certificate of %q has no name spiffe://DOMAIN/lockstep/… (lockstep pki issues such)", ErrIdentity, cert.Subject.CommonName)
	}
	return id, nil
}

// Agent returns nil when id may report ranks of a job on a node.
func (id Identity) Agent(node, job string) error {
	if id.Role != RoleAgent || id.Node != node || id.Jobs != nil && !slices.Contains(id.Jobs, job) {
		return fmt.Errorf("%w: %s is not the agent of node %s for job %s", ErrIdentity, id, node, job)
	}
	return nil
}

// Master returns nil when id is the master of a job.
func (id Identity) Master(job string) error {
	if id.Role != RoleMaster || !slices.Contains(id.Jobs, job) {
		return fmt.Errorf("%w: %s is not the master of job %s", ErrIdentity, id, job)
	}
	return nil
}

// Remediator returns nil when id may ask for incidents.
func (id Identity) Remediator() error {
	if id.Role != RoleRemediator {
		return fmt.Errorf("%w: %s is not a remediator", ErrIdentity, id)
	}
	return nil
}

// Planner returns nil when id may give paths.
func (id Identity) Planner() error {
	if id.Role != RolePlanner {
		return fmt.Errorf("%w: %s is not a planner", ErrIdentity, id)
	}
	return nil
}

// PeerIdentity is that of the other end of an RPC; authenticated is false when the connection is plain text.
func PeerIdentity(ctx context.Context) (id Identity, authenticated bool, err error) {
	p, ok := peer.FromContext(ctx)
	if !ok {
		return Identity{}, false, nil
	}
	info, ok := p.AuthInfo.(credentials.TLSInfo)
	if !ok {
		return Identity{}, false, nil
	}
	certs := info.State.PeerCertificates
	if len(certs) == 0 {
		return Identity{}, true, fmt.Errorf("%w: it has none", ErrIdentity)
	}
	if ends := expires(info.State.VerifiedChains); !ends.IsZero() && !time.Now().Before(ends) {
		return Identity{}, true, fmt.Errorf("%w: it ended at %v, and the connection is older", ErrIdentity, ends)
	}
	id, err = IdentityIn(certs[0])
	return id, true, err
}

// PeerExpires is when the certificate of the other end of an RPC ends, or one
// that signed it; zero on plain text.
func PeerExpires(ctx context.Context) time.Time {
	if p, ok := peer.FromContext(ctx); ok {
		if info, ok := p.AuthInfo.(credentials.TLSInfo); ok {
			return expires(info.State.VerifiedChains)
		}
	}
	return time.Time{}
}

// expires is when the last of several chains ends.
func expires(chains [][]*x509.Certificate) (last time.Time) {
	for _, chain := range chains {
		var first time.Time
		for _, c := range chain {
			if first.IsZero() || c.NotAfter.Before(first) {
				first = c.NotAfter
			}
		}
		if first.After(last) {
			last = first
		}
	}
	return last
}
