package otlp

import "context"

// Send sends an empty request once, for its error.
func Send(c Config) error {
	s, err := newSender(c)
	if err != nil {
		return err
	}
	_, _, err = s.send(context.Background(), nil)
	_ = s.close()
	return err
}
