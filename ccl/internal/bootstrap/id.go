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

// ID names a communicator before it exists, as ncclUniqueId does. Rank 0 makes it, and
// the other ranks get it out of band. It is not secret.
type ID struct {
	Addr  string   // where rank 0 listens, host:port
	Token [16]byte // random: one address may serve several communicators
}

const idPrefix = "lockstep1:"

// NewID returns an ID with a fresh token. Rank 0 will listen at addr (host:port).
func NewID(addr string) ID {
	id := ID{Addr: addr}
	rand.Read(id.Token[:]) // never fails (crypto/rand)
	return id
}

// ParseID is the inverse of ID.String. Its error quotes s.
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

// String returns "lockstep1:host:port:hex", the form for environment variables and files.
func (id ID) String() string { return idPrefix + id.Addr + ":" + hex.EncodeToString(id.Token[:]) }

// Uint64 returns the communicator's id in records, metrics and traces.
func (id ID) Uint64() uint64 { return binary.LittleEndian.Uint64(id.Token[:]) }

// derive returns the token of a communicator that Regroup forms. Every member computes the
// same token, so they need not exchange one.
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

// SecretEnv is the environment variable that names the file with the job's secret.
const SecretEnv = "LOCKSTEP_SECRET_FILE"

// minSecret is the minimal length of a secret, in bytes.
const minSecret = 16

// LoadSecret returns the content of the file that SecretEnv names, without white space at
// its ends. It returns nil if the variable is unset. It fails if fewer than 16 bytes are
// left, or if other users can read or write the file: whoever knows the secret can join
// and abort the job.
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

// FenceEnv is the environment variable with the token of the job's attempt (package fence).
const FenceEnv = "LOCKSTEP_FENCE_TOKEN"

// attemptKey returns the key that the ranks of one attempt share: the attempt's token under the
// job's secret. Ranks of an earlier attempt do not have it, so they cannot join this one. If token
// is "", the value of FenceEnv is used. If that is unset, the key is the secret.
func attemptKey(secret []byte, token string) []byte {
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

// prove returns one side's proof that it knows the secret, an HMAC. who, "client" or "server",
// keeps a side from sending the other's proof back to it. The nonces make each proof valid once.
func prove(secret []byte, who string, version uint16, token [16]byte, client, server [nonceSize]byte) [sha256.Size]byte {
	m := hmac.New(sha256.New, secret)
	io.WriteString(m, who)
	m.Write([]byte{0, byte(version), byte(version >> 8)})
	m.Write(token[:])
	m.Write(client[:])
	m.Write(server[:])
	return [sha256.Size]byte(m.Sum(nil))
}

// pass returns the second half of a client's nonce: an HMAC of the first half, the salt. So a
// listener can recognise a member by its first message (see wire.go).
func pass(secret []byte, token [16]byte, salt []byte) []byte {
	m := hmac.New(sha256.New, secret)
	io.WriteString(m, "pass\x00")
	m.Write(token[:])
	m.Write(salt)
	return m.Sum(nil)[:nonceSize-saltSize]
}
