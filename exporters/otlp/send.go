package otlp

import (
	"bytes"
	"compress/gzip"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"time"

	"github.com/cenkalti/backoff/v5"
	coltracepb "go.opentelemetry.io/proto/otlp/collector/trace/v1"
	"google.golang.org/genproto/googleapis/rpc/errdetails"
	rpcstatus "google.golang.org/genproto/googleapis/rpc/status"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"
	grpcgzip "google.golang.org/grpc/encoding/gzip"
	"google.golang.org/grpc/mem"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
)

// sender delivers encoded ExportTraceServiceRequests. One attempt each: its
// errors say whether to try again, in package backoff's terms.
type sender struct {
	endpoint   string // as logs may show it
	timeout    time.Duration
	firstRetry time.Duration
	notBefore  time.Time // when the backend wants to be asked again; it belongs to deliver
	post       func(ctx context.Context, request []byte, response *coltracepb.ExportTraceServiceResponse) error
	close      func() error
}

func newSender(c Config) (*sender, error) {
	s := &sender{endpoint: shown(c.Endpoint), timeout: c.Timeout, firstRetry: time.Second}
	if s.timeout <= 0 {
		s.timeout = 10 * time.Second
	}
	if c.Protocol == GRPC {
		return s, s.dial(c)
	}
	s.client(c)
	return s, nil
}

// send delivers request once. The backend may accept it and reject some spans.
func (s *sender) send(ctx context.Context, request []byte) (rejected int64, message string, err error) {
	ctx, cancel := context.WithTimeout(ctx, s.timeout)
	defer cancel()
	var response coltracepb.ExportTraceServiceResponse
	if err := s.post(ctx, request, &response); err != nil {
		return 0, "", err
	}
	p := response.GetPartialSuccess()
	return p.GetRejectedSpans(), short(p.GetErrorMessage()), nil
}

func (s *sender) dial(c Config) error {
	creds := insecure.NewCredentials()
	if c.TLS != nil {
		creds = credentials.NewTLS(c.TLS)
	}
	conn, err := grpc.NewClient(c.Endpoint, grpc.WithTransportCredentials(creds), grpc.WithUserAgent("lockstep"))
	if err != nil {
		return fmt.Errorf("OTLP endpoint %q: %w", s.endpoint, err)
	}
	options := []grpc.CallOption{grpc.ForceCodecV2(rawCodec{})}
	if c.Gzip {
		options = append(options, grpc.UseCompressor(grpcgzip.Name))
	}
	headers := metadata.New(c.Headers)
	s.close = conn.Close
	s.post = func(ctx context.Context, request []byte, response *coltracepb.ExportTraceServiceResponse) error {
		ctx = metadata.NewOutgoingContext(ctx, headers)
		return classify(shortened(conn.Invoke(ctx, coltracepb.TraceService_Export_FullMethodName, request, response, options...)))
	}
	return nil
}

// notHTTP says what to change when the endpoint does not speak HTTP/1: a gRPC server answers with
// a frame of HTTP/2, or hangs up.
func notHTTP(err error) error {
	if text := err.Error(); strings.Contains(text, "malformed HTTP") || strings.Contains(text, "HTTP/0.9") || strings.Contains(text, "HTTP version") || strings.Contains(text, "readLoopPeekFail") || errors.Is(err, io.EOF) {
		return fmt.Errorf("%w: the endpoint does not speak HTTP; if it speaks gRPC (port 4317 by convention), set OTEL_EXPORTER_OTLP_PROTOCOL=grpc", err)
	}
	return err
}

// shortened is a gRPC error of bounded length, with what to change for a server that does not speak gRPC.
func shortened(err error) error {
	if err == nil {
		return nil
	}
	p := status.Convert(err).Proto()
	p.Message = short(p.Message)
	if text := p.Message; !strings.Contains(text, "unexpected HTTP status") && !strings.Contains(text, "content-type") && !strings.Contains(text, "server preface") && !strings.Contains(text, "http2: ") {
		return status.ErrorProto(p)
	}
	p.Message += ": the endpoint does not speak gRPC; if it speaks HTTP (port 4318 by convention), set OTEL_EXPORTER_OTLP_PROTOCOL=http/protobuf"
	return status.ErrorProto(p)
}

// rawCodec sends bytes that are protobuf already.
type rawCodec struct{}

func (rawCodec) Name() string { return "proto" }

func (rawCodec) Marshal(v any) (mem.BufferSlice, error) {
	return mem.BufferSlice{mem.SliceBuffer(v.([]byte))}, nil
}

func (rawCodec) Unmarshal(data mem.BufferSlice, v any) error {
	return proto.Unmarshal(data.Materialize(), v.(proto.Message))
}

// classify applies OTLP's table of retryable gRPC codes.
func classify(err error) error {
	if err == nil {
		return nil
	}
	s := status.Convert(err)
	var after *errdetails.RetryInfo
	for _, d := range s.Details() {
		if info, ok := d.(*errdetails.RetryInfo); ok {
			after = info
		}
	}
	switch s.Code() {
	case codes.Canceled, codes.DeadlineExceeded, codes.Aborted, codes.OutOfRange, codes.Unavailable, codes.DataLoss:
	case codes.ResourceExhausted:
		if after == nil { // only a server that says when it will recover
			return backoff.Permanent(err)
		}
	default:
		return backoff.Permanent(err)
	}
	return pause(err, after.GetRetryDelay().AsDuration())
}

// pause is err of a backend that wants to be left alone for d, which may be any number.
func pause(err error, d time.Duration) error {
	if d <= 0 {
		return err
	}
	return errors.Join(err, &backoff.RetryAfterError{Duration: min(d, maxPause)})
}

func (s *sender) client(c Config) {
	transport := http.DefaultTransport.(*http.Transport).Clone()
	transport.TLSClientConfig = c.TLS.Clone()
	client := &http.Client{
		Transport: transport,
		// A redirect would turn the POST into a GET.
		CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
	}
	s.close = func() error { client.CloseIdleConnections(); return nil }
	s.post = func(ctx context.Context, request []byte, response *coltracepb.ExportTraceServiceResponse) error {
		req, err := newRequest(ctx, c, request)
		if err != nil {
			return backoff.Permanent(err)
		}
		resp, err := client.Do(req)
		if err != nil {
			var of *url.Error
			if errors.As(err, &of) {
				err = of.Err // without the URL, which may hold credentials
			}
			return notHTTP(err)
		}
		defer resp.Body.Close()
		body, err := io.ReadAll(io.LimitReader(resp.Body, 64<<10))
		if resp.StatusCode/100 == 2 {
			if err == nil {
				err = proto.Unmarshal(body, response)
			}
			if err != nil { // accepted all the same: sending it again would double it
				response.Reset()
			}
			return nil
		}
		return classifyHTTP(resp, refusal(resp, body))
	}
}

// refusal is why the backend refuses, by its status and its own words: a
// google.rpc.Status in protobuf by the specification, text from what stands before it.
func refusal(resp *http.Response, body []byte) error {
	words := string(body)
	if strings.HasPrefix(resp.Header.Get("Content-Type"), "application/x-protobuf") {
		var s rpcstatus.Status
		_ = proto.Unmarshal(body, &s) // what cannot be read has nothing to say
		words = s.GetMessage()
	}
	if words = short(words); words == "" {
		return errors.New(short(resp.Status))
	}
	return fmt.Errorf("%s: %s", short(resp.Status), words)
}

// short is a backend's text on one line of bounded length, fit for a log.
func short(words string) string {
	words = strings.Join(strings.Fields(words), " ")
	if len(words) > maxWords {
		words = words[:maxWords]
	}
	return valid(words)
}

// maxWords is how many bytes are told of a backend's reason, or of a transport's, which may name certificates.
const maxWords = 1000

func newRequest(ctx context.Context, c Config, request []byte) (*http.Request, error) {
	body := request
	if c.Gzip {
		var zipped bytes.Buffer
		z := gzip.NewWriter(&zipped)
		_, _ = z.Write(request) // a bytes.Buffer takes everything
		_ = z.Close()
		body = zipped.Bytes()
	}
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, c.Endpoint, bytes.NewReader(body))
	if err != nil {
		return nil, err
	}
	for k, v := range c.Headers {
		req.Header.Set(k, v)
	}
	req.Header.Set("User-Agent", "lockstep")
	req.Header.Set("Content-Type", "application/x-protobuf")
	if c.Gzip {
		req.Header.Set("Content-Encoding", "gzip")
	}
	return req, nil
}

// classifyHTTP applies OTLP's table of retryable status codes.
func classifyHTTP(resp *http.Response, err error) error {
	switch resp.StatusCode {
	case http.StatusTooManyRequests, http.StatusBadGateway, http.StatusServiceUnavailable, http.StatusGatewayTimeout:
	default:
		return backoff.Permanent(err)
	}
	after := resp.Header.Get("Retry-After")
	if at, e := http.ParseTime(after); e == nil {
		return pause(err, time.Until(at))
	}
	// What does not fit an int64 is cut to its ends.
	seconds, _ := strconv.ParseInt(after, 10, 64)
	return pause(err, time.Duration(min(seconds, int64(maxPause/time.Second)))*time.Second)
}
