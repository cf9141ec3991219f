package main

import (
	"context"
	"time"

	corev1 "k8s.io/api/core/v1"
	apiextensions "k8s.io/apiextensions-apiserver/pkg/client/clientset/clientset/scheme"
	"k8s.io/apimachinery/pkg/runtime/schema"
	policy "k8s.io/apiserver/pkg/admission/plugin/policy/validating"
	"k8s.io/apiserver/pkg/cel/openapi/resolver"
	"k8s.io/apiserver/pkg/quota/v1/generic"
	"k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/util/keyutil"
	"k8s.io/klog/v2"
	pkgcontroller "k8s.io/kubernetes/pkg/controller"
	"k8s.io/kubernetes/pkg/controller/clusterroleaggregation"
	"k8s.io/kubernetes/pkg/controller/garbagecollector"
	"k8s.io/kubernetes/pkg/controller/namespace"
	"k8s.io/kubernetes/pkg/controller/resourcequota"
	serviceaccounts "k8s.io/kubernetes/pkg/controller/serviceaccount"
	"k8s.io/kubernetes/pkg/controller/validatingadmissionpolicystatus"
	"k8s.io/kubernetes/pkg/generated/openapi"
	quotas "k8s.io/kubernetes/pkg/quota/v1/install"
	"k8s.io/kubernetes/pkg/serviceaccount"
)

// Workers of each controller: enough for a burst of test namespaces, few enough for two cores.
const workers = 10

// discoverEvery is how often quota and garbage collection look for new kinds of objects.
const discoverEvery = 30 * time.Second

// controllers has the real controllers under their names in kube-controller-manager's --controllers, each as a
// function that builds it and returns what is to be run.
var controllers = map[string]func(context.Context, *environment) ([]func(context.Context), error){
	"namespace-controller":                        buildNamespace,
	"resourcequota-controller":                    buildResourceQuota,
	"serviceaccount-controller":                   buildServiceAccount,
	"serviceaccount-token-controller":             buildServiceAccountToken,
	"garbage-collector-controller":                buildGarbageCollector,
	"clusterrole-aggregation-controller":          buildClusterRoleAggregation,
	"validatingadmissionpolicy-status-controller": buildPolicyStatus,
}

func buildNamespace(ctx context.Context, env *environment) ([]func(context.Context), error) {
	controller := namespace.NewNamespaceController(
		ctx, env.client, env.metadata, env.discovery.ServerPreferredNamespacedResources,
		env.typed.Core().V1().Namespaces(), resync, corev1.FinalizerKubernetes)
	return []func(context.Context){
		func(ctx context.Context) { controller.Run(ctx, workers) },
	}, nil
}

func buildResourceQuota(ctx context.Context, env *environment) ([]func(context.Context), error) {
	configuration, err := quotas.NewQuotaConfigurationForControllers(
		generic.ListerFuncForResourceFunc(env.typed.ForResource), env.typed)
	if err != nil {
		return nil, err
	}
	discover := env.discovery.ServerPreferredNamespacedResources
	controller, err := resourcequota.NewController(ctx, &resourcequota.ControllerOptions{
		QuotaClient:               env.client.CoreV1(),
		ResourceQuotaInformer:     env.typed.Core().V1().ResourceQuotas(),
		ResyncPeriod:              pkgcontroller.StaticResyncPeriodFunc(time.Minute),
		InformerFactory:           env.any,
		ReplenishmentResyncPeriod: pkgcontroller.StaticResyncPeriodFunc(resync),
		DiscoveryFunc:             discover,
		IgnoredResourcesFunc:      configuration.IgnoredResources,
		InformersStarted:          env.started,
		Registry:                  generic.NewRegistry(configuration.Evaluators()),
		UpdateFilter:              quotas.DefaultUpdateFilter(),
	})
	if err != nil {
		return nil, err
	}
	return []func(context.Context){
		func(ctx context.Context) { controller.Run(ctx, workers) },
		func(ctx context.Context) { controller.Sync(ctx, discover, discoverEvery) },
	}, nil
}

func buildServiceAccount(ctx context.Context, env *environment) ([]func(context.Context), error) {
	controller, err := serviceaccounts.NewServiceAccountsController(
		klog.FromContext(ctx), env.typed.Core().V1().ServiceAccounts(), env.typed.Core().V1().Namespaces(),
		env.client, serviceaccounts.DefaultServiceAccountsControllerOptions())
	if err != nil {
		return nil, err
	}
	return []func(context.Context){
		func(ctx context.Context) { controller.Run(ctx, workers) },
	}, nil
}

func buildServiceAccountToken(ctx context.Context, env *environment) ([]func(context.Context), error) {
	key, err := keyutil.PrivateKeyFromFile(env.options.signingKey)
	if err != nil {
		return nil, err
	}
	ca, err := readFile(env.options.rootCA)
	if err != nil {
		return nil, err
	}
	generator, err := serviceaccount.JWTTokenGenerator(serviceaccount.LegacyIssuer, key)
	if err != nil {
		return nil, err
	}
	controller, err := serviceaccounts.NewTokensController(
		klog.FromContext(ctx), env.typed.Core().V1().ServiceAccounts(), env.typed.Core().V1().Secrets(),
		env.client, serviceaccounts.TokensControllerOptions{TokenGenerator: generator, RootCA: ca})
	if err != nil {
		return nil, err
	}
	return []func(context.Context){
		func(ctx context.Context) { controller.Run(ctx, workers) },
	}, nil
}

func buildGarbageCollector(ctx context.Context, env *environment) ([]func(context.Context), error) {
	ignored := map[schema.GroupResource]struct{}{}
	for resource := range garbagecollector.DefaultIgnoredResources() {
		ignored[resource] = struct{}{}
	}
	graph := garbagecollector.NewDependencyGraphBuilder(
		ctx, env.metadata, env.mapper, ignored, env.any, env.started)
	controller, err := garbagecollector.NewComposedGarbageCollector(
		ctx, env.client, env.metadata, env.mapper, graph)
	if err != nil {
		return nil, err
	}
	return []func(context.Context){
		func(ctx context.Context) { controller.Run(ctx, workers, discoverEvery) },
		func(ctx context.Context) { controller.Sync(ctx, env.discovery, discoverEvery) },
	}, nil
}

func buildClusterRoleAggregation(_ context.Context, env *environment) ([]func(context.Context), error) {
	controller := clusterroleaggregation.NewClusterRoleAggregation(
		env.typed.Rbac().V1().ClusterRoles(), env.client.RbacV1())
	return []func(context.Context){
		func(ctx context.Context) { controller.Run(ctx, workers) },
	}, nil
}

func buildPolicyStatus(_ context.Context, env *environment) ([]func(context.Context), error) {
	checker := &policy.TypeChecker{
		SchemaResolver: resolver.NewDefinitionsSchemaResolver(
			openapi.GetOpenAPIDefinitions, scheme.Scheme, apiextensions.Scheme,
		).Combine(&resolver.ClientDiscoveryResolver{Discovery: env.discovery}),
		RestMapper: env.mapper,
	}
	controller, err := validatingadmissionpolicystatus.NewController(
		env.typed.Admissionregistration().V1().ValidatingAdmissionPolicies(),
		env.client.AdmissionregistrationV1().ValidatingAdmissionPolicies(), checker)
	if err != nil {
		return nil, err
	}
	return []func(context.Context){
		func(ctx context.Context) { controller.Run(ctx, workers) },
	}, nil
}
