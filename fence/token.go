package fence

import (
	"crypto/rand"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"os"
	"strconv"
	"strings"
	"time"
)

// Env holds a rank's Token.
const Env = "LOCKSTEP_FENCE_TOKEN"

// Token is one attempt's.
type Token struct {
	// Generation orders attempts, also those of several runs of one job: a later one has a higher.
	Generation uint64
	Attempt    int      // as people count
	Nonce      [16]byte // nobody else's
}

const tokenPrefix = "fence1"

// maxAttempt is the collector's bound.
const maxAttempt = 1 << 20

// New makes the token of an attempt that begins now. last is the generation of the attempt
// before it, 0 when there is none that is known: then the clock says that it is later.
func New(attempt int, last uint64) Token {
	t := Token{Generation: max(uint64(time.Now().UnixMilli()), last+1), Attempt: attempt}
	rand.Read(t.Nonce[:]) // never fails
	return t
}

// String is the form that travels in environments: "fence1-GENERATION-ATTEMPT-HEX".
func (t Token) String() string {
	return fmt.Sprintf("%s-%d-%d-%s", tokenPrefix, t.Generation, t.Attempt, hex.EncodeToString(t.Nonce[:]))
}

// Parse is the inverse of Token.String.
func Parse(s string) (Token, error) {
	var t Token
	p := strings.Split(s, "-")
	if len(p) != 4 || p[0] != tokenPrefix || len(s) > 128 {
		return Token{}, fmt.Errorf("fence token %.16q: want %s-GENERATION-ATTEMPT-HEX", s, tokenPrefix)
	}
	var err error
	if t.Generation, err = strconv.ParseUint(p[1], 10, 63); err != nil || t.Generation == 0 {
		return Token{}, fmt.Errorf("fence token: generation %.24q: want a number above 0", p[1])
	}
	if t.Attempt, err = strconv.Atoi(p[2]); err != nil || t.Attempt < 0 || t.Attempt > maxAttempt {
		return Token{}, fmt.Errorf("fence token: attempt %.24q: want a number from 0 to %d", p[2], maxAttempt)
	}
	b, err := hex.DecodeString(p[3])
	if err != nil || len(b) != len(t.Nonce) {
		return Token{}, fmt.Errorf("fence token: want %d hex digits at its end", 2*len(t.Nonce))
	}
	copy(t.Nonce[:], b)
	if t.String() != s { // signs, zeros in front, capitals: ranks compare the text
		return Token{}, fmt.Errorf("fence token %.16q…: not in the form that it is made in", s)
	}
	return t, nil
}

// ErrNone says that the launcher has given this process no token.
var ErrNone = errors.New("no " + Env + " is set: nothing keeps this attempt apart from earlier ones")

// TokenFromEnv reads this process's token.
func TokenFromEnv() (Token, error) {
	s := os.Getenv(Env)
	if s == "" {
		return Token{}, ErrNone
	}
	return Parse(s)
}

// key is what is written down of the nonce: who reads it does not know the token.
func (t Token) key() string {
	h := sha256.Sum256([]byte("lockstep claim\x00" + t.String()))
	return hex.EncodeToString(h[:16])
}
