package bootstrap

import (
	"crypto/hmac"
	"crypto/rand"
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"strings"

	"github.com/lockstep-ccl/lockstep/internal/statedir"
)

// ID names one communicator before it exists: where its rank 0 listens, and a
// random token that keeps rendezvous apart that meet at the same address.
// Rank 0 makes it, everyone else gets it out of band. It is no secret.
type ID struct {
	Addr  string // host:port
	Token [16]byte
}

const idPrefix = "lockstep1:"

// NewID returns an ID with a fresh token for a rank 0 that will listen at addr.
func NewID(addr string) ID {
	id := ID{Addr: addr}
	rand.Read(id.Token[:]) // never fails (crypto/rand)
	return id
}

// ParseID is the inverse of ID.String.
func ParseID(s string) (ID, error) {
	rest, ok := strings.CutPrefix(s, idPrefix)
	cut := strings.LastIndexByte(rest, ':')
	if !ok || cut < 0 {
		return ID{}, fmt.Errorf("communicator id %q: want %shost:port:hex", s, idPrefix)
	}
	id := ID{Addr: rest[:cut]}
	if _, _, err := net.SplitHostPort(id.Addr); err != nil {
		return ID{}, fmt.Errorf("communicator id %q: %w", s, err)
	}
	token, err := hex.DecodeString(rest[cut+1:])
	if err != nil || len(token) != len(id.Token) {
		return ID{}, fmt.Errorf("communicator id %q: the token is not %d hex digits", s, 2*len(id.Token))
	}
	copy(id.Token[:], token)
	return id, nil
}

// String is the form that travels in environments and files: "lockstep1:host:port:hex".
func (id ID) String() string { return idPrefix + id.Addr + ":" + hex.EncodeToString(id.Token[:]) }

// Uint64 is the communicator's id in records, metrics and traces.
func (id ID) Uint64() uint64 { return binary.LittleEndian.Uint64(id.Token[:]) }

// derive gives the token of a group of members of id's communicator.
func (id ID) derive(tag string, members []int) [16]byte {
	h := sha256.New()
	h.Write(id.Token[:])
	h.Write(binary.LittleEndian.AppendUint64(nil, uint64(len(tag))))
	io.WriteString(h, tag)
	for _, m := range members {
		h.Write(binary.LittleEndian.AppendUint64(nil, uint64(m)))
	}
	return [16]byte(h.Sum(nil))
}

// SecretEnv names the file with the job's secret.
const SecretEnv = "LOCKSTEP_SECRET_FILE"

// minSecret is how many bytes a secret has at least.
const minSecret = 16

// LoadSecret reads the file that SecretEnv names: the whole file, white space
// at its ends trimmed, at least 16 bytes. One that others could have read is refused:
// who knows it may join, and abort. Without the variable it returns nil.
func LoadSecret() ([]byte, error) {
	path := os.Getenv(SecretEnv)
	if path == "" {
		return nil, nil
	}
	b, err := statedir.ReadSecret(path)
	if err != nil {
		return nil, fmt.Errorf("read %s: %w", SecretEnv, err)
	}
	if len(b) < minSecret {
		return nil, fmt.Errorf("read %s: %s holds %d bytes, want at least %d of high entropy", SecretEnv, path, len(b), minSecret)
	}
	return b, nil
}

// FenceEnv holds the token of the job's attempt, which package fence describes.
const FenceEnv = "LOCKSTEP_FENCE_TOKEN"

// ofAttempt is what the ranks of one attempt prove to each other: that they know the job's
// secret, and are of the attempt. Without a token it is the secret.
func ofAttempt(secret []byte, token string) []byte {
	if token == "" {
		token = os.Getenv(FenceEnv)
	}
	if token == "" {
		return secret
	}
	m := hmac.New(sha256.New, secret)
	io.WriteString(m, "attempt\x00"+token)
	return m.Sum(nil)
}

var errNoSecret = errors.New("no shared secret: set Config.Secret or " + SecretEnv)

// prove is the answer to a challenge: who says it, and both sides' nonces, under the secret.
func prove(secret []byte, who string, version uint16, token [16]byte, client, server [nonceSize]byte) [sha256.Size]byte {
	m := hmac.New(sha256.New, secret)
	io.WriteString(m, who)
	m.Write([]byte{0, byte(version), byte(version >> 8)})
	m.Write(token[:])
	m.Write(client[:])
	m.Write(server[:])
	return [sha256.Size]byte(m.Sum(nil))
}

// pass is the half of a client's nonce that only who knows the secret can make.
func pass(secret []byte, token [16]byte, salt []byte) []byte {
	m := hmac.New(sha256.New, secret)
	io.WriteString(m, "pass\x00")
	m.Write(token[:])
	m.Write(salt)
	return m.Sum(nil)[:nonceSize-saltSize]
}
