package ccl

import (
	"crypto/rand"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"

	"github.com/lockstep-ccl/lockstep/ccl/internal/bootstrap"
	"github.com/lockstep-ccl/lockstep/launcher"
	"github.com/lockstep-ccl/lockstep/record"
)

// Where nobody has set LOCKSTEP_COMM_ID the id is derived from what torchrun, and whoever
// else sets torch.distributed's variables, tells all ranks alike: rank 0 listens at
// MASTER_ADDR, one port above MASTER_PORT, which torch's own store has, and the token is
// of the run, its attempt and its size. An id is no secret: ranks prove the secret of
// LOCKSTEP_SECRET_FILE as ever. Ranks of one host and user, who may read each other's
// files anyway, find one in the runtime directory.

// portEnv names the derived port where the one above MASTER_PORT is not free.
const portEnv = "LOCKSTEP_COMM_PORT"

// derivedID returns an id and, when the ranks are of one host and have no secret, the
// name of the file for one.
func derivedID(who launcher.Identity, size, attempt int) (UniqueID, string, error) {
	host, port := os.Getenv("MASTER_ADDR"), os.Getenv("MASTER_PORT")
	if host == "" || port == "" {
		return UniqueID{}, "", errors.New("LOCKSTEP_COMM_ID is not set (lockstep run sets it; or make one with ccl.NewUniqueID), and neither are torchrun's MASTER_ADDR and MASTER_PORT")
	}
	n, err := strconv.Atoi(port)
	if err != nil || n < 1 || n > 65535 {
		return UniqueID{}, "", fmt.Errorf("MASTER_PORT is %q, want a port", port)
	}
	at := n + 1
	if n == 65535 {
		at = n - 1
	}
	if v := os.Getenv(portEnv); v != "" {
		if at, err = strconv.Atoi(v); err != nil || at < 1 || at > 65535 || at == n {
			return UniqueID{}, "", fmt.Errorf("%s is %q, want a port other than MASTER_PORT, which torch's store has", portEnv, v)
		}
	}
	h := sha256.New()
	for _, s := range []string{"lockstep: id by torchrun's variables", os.Getenv("TORCHELASTIC_RUN_ID"), who.Job, port, strconv.Itoa(size), strconv.Itoa(attempt)} {
		fmt.Fprintf(h, "%d:%s,", len(s), s)
	}
	id := bootstrap.ID{Addr: net.JoinHostPort(host, strconv.Itoa(at)), Token: [16]byte(h.Sum(nil))}
	if os.Getenv(bootstrap.SecretEnv) != "" {
		return UniqueID{id}, "", nil
	}
	if !oneHost(host, size) {
		return UniqueID{}, "", fmt.Errorf("%s is not set: ranks of several hosts prove a secret to each other. Put the same 32 random bytes on each "+
			"(openssl rand -hex 32 >FILE; chmod 600 FILE) and set it to FILE", bootstrap.SecretEnv)
	}
	return UniqueID{id}, hex.EncodeToString(id.Token[:]) + ".secret", nil
}

// oneHost reports whether all ranks are surely on this host.
func oneHost(master string, size int) bool {
	if n, err := strconv.Atoi(os.Getenv("LOCAL_WORLD_SIZE")); err == nil {
		return n == size
	}
	ip := net.ParseIP(master)
	return master == "localhost" || ip != nil && ip.IsLoopback()
}

// secretDir is a directory that is this user's alone: the runtime directory, or where
// somebody else has taken its name one below the home directory.
func secretDir() string {
	dir, _, err := record.Dir("")
	if err == nil {
		return dir
	}
	if cache, err := os.UserCacheDir(); err == nil {
		return filepath.Join(cache, "lockstep")
	}
	return record.DefaultDir()
}

// sharedSecret returns what the file holds, which the first rank to come makes. It is
// this user's, and nobody else may read it.
func sharedSecret(dir, name string) ([]byte, error) {
	if err := record.UseDir(dir); err != nil {
		return nil, err
	}
	path := filepath.Join(dir, name)
	for range 2 {
		switch secret, err := readSecret(path); {
		case err == nil:
			return secret, nil
		case !errors.Is(err, os.ErrNotExist):
			return nil, err
		}
		if err := makeSecret(dir, path); err != nil && !errors.Is(err, os.ErrExist) {
			return nil, err
		}
	}
	return readSecret(path)
}

func readSecret(path string) ([]byte, error) {
	f, err := os.OpenFile(path, os.O_RDONLY|syscall.O_NOFOLLOW|syscall.O_NONBLOCK, 0)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	fi, err := f.Stat()
	if err != nil {
		return nil, err
	}
	st, ok := fi.Sys().(*syscall.Stat_t)
	if !ok || !fi.Mode().IsRegular() || fi.Mode().Perm()&0o077 != 0 || int(st.Uid) != os.Geteuid() {
		return nil, fmt.Errorf("%s is not this user's alone (mode %v): remove it", path, fi.Mode())
	}
	b, err := io.ReadAll(io.LimitReader(f, 1<<10))
	if secret := strings.TrimSpace(string(b)); err != nil || len(secret) >= 32 {
		return []byte(secret), err
	}
	return nil, fmt.Errorf("%s holds no secret: remove it", path)
}

// makeSecret makes the file, whole from the moment that it is there.
func makeSecret(dir, path string) error {
	f, err := os.CreateTemp(dir, ".secret-*") // O_EXCL, 0600
	if err != nil {
		return err
	}
	defer os.Remove(f.Name())
	var b [32]byte
	rand.Read(b[:]) // never fails
	_, err = f.WriteString(hex.EncodeToString(b[:]) + "\n")
	if err := errors.Join(err, f.Close()); err != nil {
		return err
	}
	return os.Link(f.Name(), path)
}
