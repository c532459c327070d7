-- sampled PROBLEM_ID: in which steps of reinforcement learning this problem was sampled, why (when a curriculum chose), and how it did
with sampled as (
    select *
    from rollouts
    where problem_id = $problem_id
    union all by name
    select null::varchar as why, null::double as success_rate, null::double as weight
    where false
),

final as (
    select stage, step, count(*) as rollouts, avg(reward) as mean_reward, any_value(why) as why, any_value(success_rate) as success_rate
    from sampled
    group by stage, step
    order by stage, step
)

select * from final
