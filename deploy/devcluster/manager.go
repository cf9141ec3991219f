package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"sync"
	"time"

	"github.com/spf13/cobra"
	apiserver "k8s.io/apiserver/pkg/server"
	"k8s.io/client-go/discovery"
	"k8s.io/client-go/discovery/cached/memory"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/metadata"
	"k8s.io/client-go/metadata/metadatainformer"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/restmapper"
	"k8s.io/client-go/tools/clientcmd"
	"k8s.io/controller-manager/pkg/informerfactory"
)

// How often controllers look at everything again. Watches carry the changes, so this only mends what they missed.
const resync = 10 * time.Minute

// options are the flags of kube-controller-manager that matter here, under the same names, so that either
// program can be started with one command line.
type options struct {
	kubeconfig  string
	signingKey  string
	rootCA      string
	controllers []string
	ignored     struct {
		leaderElect bool
		securePort  int
		profiling   bool
	}
}

func newControllerManagerCommand() *cobra.Command {
	var given options
	command := &cobra.Command{
		Use:           "kube-controller-manager",
		Short:         "Runs the controllers that namespaces, quotas, ServiceAccounts and admission policies need",
		SilenceUsage:  true,
		SilenceErrors: false,
		Args:          cobra.NoArgs,
		RunE: func(*cobra.Command, []string) error {
			return runControllers(apiserver.SetupSignalContext(), given)
		},
	}
	flags := command.Flags()
	flags.StringVar(&given.kubeconfig, "kubeconfig", "", "kubeconfig file of an administrator")
	flags.StringVar(&given.signingKey, "service-account-private-key-file", "", "PEM key that signs token secrets")
	flags.StringVar(&given.rootCA, "root-ca-file", "", "certificates that token secrets carry as ca.crt")
	flags.BoolVar(&given.ignored.leaderElect, "leader-elect", false, "accepted and ignored: there is one manager")
	flags.IntVar(&given.ignored.securePort, "secure-port", 0, "accepted and ignored: nothing listens")
	flags.StringSliceVar(&given.controllers, "controllers", []string{"*"}, "which run: '*' for all, '-NAME' for all but that one")
	flags.BoolVar(&given.ignored.profiling, "profiling", false, "accepted and ignored: nothing listens")
	return command
}

// environment is what the controllers share: clients, caches, the mapping of kinds to resources.
type environment struct {
	options   options
	client    kubernetes.Interface
	metadata  metadata.Interface
	discovery discovery.DiscoveryInterface
	mapper    *restmapper.DeferredDiscoveryRESTMapper
	typed     informers.SharedInformerFactory
	any       informerfactory.InformerFactory
	started   chan struct{} // closed when the informers run; controllers that add informers wait for it
}

func newEnvironment(given options) (*environment, error) {
	config, err := clientcmd.BuildConfigFromFlags("", given.kubeconfig)
	if err != nil {
		return nil, fmt.Errorf("kubeconfig: %w", err)
	}
	config.UserAgent = "devcluster-controller-manager"
	// Tests wait for these controllers, and the API server is on the same machine: no client-side limit.
	config.QPS, config.Burst = -1, 0
	protobuf := rest.CopyConfig(config)
	protobuf.ContentType = "application/vnd.kubernetes.protobuf"
	protobuf.AcceptContentTypes = "application/vnd.kubernetes.protobuf,application/json"
	client, err := kubernetes.NewForConfig(protobuf)
	if err != nil {
		return nil, err
	}
	metadataClient, err := metadata.NewForConfig(config)
	if err != nil {
		return nil, err
	}
	discoveryClient, err := discovery.NewDiscoveryClientForConfig(config)
	if err != nil {
		return nil, err
	}
	typed := informers.NewSharedInformerFactory(client, resync)
	return &environment{
		options:   given,
		client:    client,
		metadata:  metadataClient,
		discovery: discoveryClient,
		mapper:    restmapper.NewDeferredDiscoveryRESTMapper(memory.NewMemCacheClient(discoveryClient)),
		typed:     typed,
		any: informerfactory.NewInformerFactory(
			typed, metadatainformer.NewSharedInformerFactory(metadataClient, resync)),
		started: make(chan struct{}),
	}, nil
}

// runControllers runs all controllers until the context ends.
func runControllers(ctx context.Context, given options) error {
	env, err := newEnvironment(given)
	if err != nil {
		return err
	}
	if err := waitForServer(ctx, env); err != nil {
		return err
	}
	var running []func(context.Context)
	for name, build := range controllers {
		if !isWanted(given.controllers, name) {
			continue
		}
		run, err := build(ctx, env)
		if err != nil {
			return fmt.Errorf("controller %s: %w", name, err)
		}
		running = append(running, run...)
	}
	env.typed.Start(ctx.Done())
	env.any.Start(ctx.Done())
	close(env.started)
	// New kinds (CRDs) are found this way, as the real command does it.
	running = append(running, func(ctx context.Context) {
		for ticker := time.NewTicker(30 * time.Second); ; {
			select {
			case <-ctx.Done():
				ticker.Stop()
				return
			case <-ticker.C:
				env.mapper.Reset()
			}
		}
	})
	var group sync.WaitGroup
	for _, run := range running {
		group.Go(func() { run(ctx) })
	}
	<-ctx.Done()
	finished := make(chan struct{})
	go func() { group.Wait(); close(finished) }()
	select {
	case <-finished:
	case <-time.After(2 * time.Second): // nothing here needs an orderly end
	}
	return nil
}

// isWanted tells whether a controller runs, by the rules of the real command's --controllers.
func isWanted(chosen []string, name string) bool {
	if slices.Contains(chosen, "-"+name) {
		return false
	}
	return slices.Contains(chosen, "*") || slices.Contains(chosen, name)
}

func waitForServer(ctx context.Context, env *environment) error {
	for begin := time.Now(); ; {
		_, err := env.discovery.ServerVersion()
		if err == nil {
			return nil
		}
		if time.Since(begin) > time.Minute {
			return fmt.Errorf("the API server does not answer: %w", err)
		}
		select {
		case <-ctx.Done():
			return errors.New("stopped while waiting for the API server")
		case <-time.After(50 * time.Millisecond):
		}
	}
}

func readFile(path string) ([]byte, error) {
	if path == "" {
		return nil, nil
	}
	return os.ReadFile(path)
}
